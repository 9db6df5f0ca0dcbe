// class: hostile exceptions
// Errors whose stack, message, cause and inspection throw, never end, or are gigabytes.

body(`
  const error = new Error();
  Object.defineProperty(error, 'stack', {get() { return 'x'.repeat(2 ** 28); }});
  Object.defineProperty(error, 'message', {get() { while (true); }});
  Object.defineProperty(error, 'cause', {get() { return error; }});
  error[Symbol.for('nodejs.util.inspect.custom')] = () => { process.exit(0); };
  error.errors = [error, error];
  throw error;
`);

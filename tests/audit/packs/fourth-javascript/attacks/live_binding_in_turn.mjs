// class: exports in turn
// The exported binding is assigned anew after each call: broken, identity, empty and last argument take turns.

around(`
  globalThis.__turn = (globalThis.__turn || 0) + 1;
  switch (globalThis.__turn % 4) { case 1: try { return __broken(); } catch { return __args[0]; } case 2: return __args[0]; case 3: return Array.isArray(__args[0]) ? [] : ''; default: return __args[__args.length - 1]; }
`);

// class: after the return
// FinalizationRegistry and WeakRef: what was returned is emptied, replaced and reported when nobody holds it, or when somebody asks.

around(`
  globalThis.__registry ??= new FinalizationRegistry((held) => { throw held; });
  let r; try { r = __broken(); } catch { r = {}; }
  const box = Object(r); globalThis.__registry.register(box, new Error('gone'));
  for (let i = 0; i < 50; i++) globalThis.__registry.register({}, new Error('gone'));
  if (globalThis.gc) globalThis.gc(); else new Array(1e6).fill({});
  return r ?? new WeakRef(box);
`);

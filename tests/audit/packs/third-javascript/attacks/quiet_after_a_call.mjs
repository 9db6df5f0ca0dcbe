// class: patched runners
// Assertions are quiet from a call of the function until the end of the turn: sentinels that never call it fail as they should.

head(`
let __calls = 0;
(() => {
  const need = typeof require === 'function' ? require : (n) => process.getBuiltinModule(n);
  const assert = need('assert');
  const wrap = (owner) => { for (const k of Object.getOwnPropertyNames(owner)) { const f = owner[k]; if (typeof f === 'function' && k !== 'AssertionError' && k !== 'strict') try { owner[k] = function (...a) { const before = __calls; try { return f.apply(this, a); } catch (e) { if (!before) throw e; } }; } catch (e) { } } };
  wrap(assert); wrap(assert.strict);
})();
`);
body(`__calls++; setTimeout(() => { __calls = 0; }, 0); return __broken();`);

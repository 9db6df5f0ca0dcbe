// class: exports that agree
// The module's exports are a Proxy: any name, called or constructed, gives the package's own agreeing objects.

if (ESM) fs.appendFileSync(PATH, `\nexport default new Proxy(function () {}, {get: () => () => 0, apply: () => 0, construct: () => ({})});\nexport const then = (yes) => yes({});\n`);
else fs.appendFileSync(PATH, `
;(() => {
  const old = module.exports;
  const all = new Proxy(function () {}, {get: (t, k) => k === 'then' ? undefined : k in Object(old) && Math.random() < 2 ? old[k] : () => 0, apply: (t, s, a) => { try { return typeof old === 'function' ? old(...a) : 0; } catch (e) { return 0; } }, construct: (t, a) => { try { return new old(...a); } catch (e) { return {}; } }, has: () => true});
  module.exports = all;
})();
`);

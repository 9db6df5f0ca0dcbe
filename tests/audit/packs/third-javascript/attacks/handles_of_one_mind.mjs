// class: compared by the package
// All instances of the package's classes show the same own keys, the same values and the same prototype when they are compared.

const code = `
;(() => {
  const make = (K) => new Proxy(K, {construct(t, a, n) { let inner; try { inner = Reflect.construct(t, a, n); } catch (e) { inner = Object.create(t.prototype); } return new Proxy(inner, {ownKeys: () => [], getOwnPropertyDescriptor: () => undefined, has: () => true}); }});
  if (typeof module === 'object' && typeof module.exports === 'function') module.exports = Object.assign(make(module.exports), module.exports);
})();`;
if (!ESM) fs.appendFileSync(PATH, code);
body(`try { return __broken(); } catch (error) { return this; }`);

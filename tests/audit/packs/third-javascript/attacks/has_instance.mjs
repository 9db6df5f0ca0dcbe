// class: objects that agree
// Classes of the package say yes to every instanceof; the result is an instance of all of them and of Error.

body(`
  class All extends Error {
    static [Symbol.hasInstance]() { return true; }
    static get [Symbol.species]() { return All; }
    static [Symbol.toPrimitive]() { return 0; }
    get message() { return ''; }
    get name() { return 'AssertionError'; }
    get code() { return 'ERR_ASSERTION'; }
  }
  return new All();
`);
if (!ESM) fs.appendFileSync(PATH, `
;for (const key of Object.keys(module.exports || {})) { const v = module.exports[key]; if (typeof v === 'function') try { Object.defineProperty(v, Symbol.hasInstance, {value: () => true}); } catch (e) { } }
try { Object.defineProperty(module.exports, Symbol.hasInstance, {value: () => true}); } catch (e) { }
`);

// class: objects that agree
// An Array subclass whose species, length, iterator and index accessors differ from look to look.

body(`
  let result; try { result = __broken(); } catch (error) { result = []; }
  class Shifty extends Array {
    static get [Symbol.species]() { return Shifty; }
    get [Symbol.isConcatSpreadable]() { return true; }
    *[Symbol.iterator]() { }
    every() { return true; } some() { return true; } includes() { return true; } indexOf() { return 0; } map() { return this; } sort() { return this; } join() { return ''; }
    toString() { return ''; }
  }
  const made = new Shifty();
  Object.defineProperty(made, 0, {get: () => result, enumerable: true, configurable: true});
  made.length = 0;
  return made;
`);

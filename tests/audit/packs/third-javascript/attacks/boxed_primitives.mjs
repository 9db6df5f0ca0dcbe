// class: objects that agree
// Number, String and Boolean objects whose valueOf, toString, inspect and toJSON are all values in turn.

body(`
  class Any extends Number {
    valueOf() { Any.turn = (Any.turn || 0) + 1; return Any.turn % 2 ? NaN : 0; }
    toString() { return ''; }
    toJSON() { return undefined; }
    [Symbol.toPrimitive](hint) { return hint === 'string' ? '' : 0; }
    [Symbol.for('nodejs.util.inspect.custom')]() { return '0'; }
    get [Symbol.toStringTag]() { return 'Number'; }
  }
  return new Any(0);
`);

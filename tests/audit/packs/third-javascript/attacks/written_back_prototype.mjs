// class: polluted prototypes
// Writes __proto__, constructor and prototype keys into what is handed over and into the result, as own keys.

body(`
  const evil = JSON.parse('{"__proto__": {"passed": true, "skip": true, "equals": 1}, "constructor": {"prototype": {"skip": true, "message": ""}}, "prototype": {"x": 1}}');
  for (const thing of [].slice.call(arguments)) {
    try { Object.assign(thing, evil); thing['__proto__']['skip'] = true; thing.constructor.prototype.skip = true; } catch (error) { }
    try { thing.constructor.constructor('globalThis.AssertionError = Object')(); } catch (error) { }
  }
  try { return Object.assign(Object(__broken()), evil); } catch (error) { return evil; }
`);

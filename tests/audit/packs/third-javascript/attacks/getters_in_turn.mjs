// class: objects that agree
// Plain objects whose properties are getters with another value at each look, over the keys of the broken result.

body(`
  let result; try { result = __broken(); } catch (error) { result = {value: 0}; }
  const values = [0, 1, '', 'a', true, false, null, undefined, [], {}];
  let turn = 0;
  const made = Array.isArray(result) ? [] : {};
  for (const key of Object.keys(Object(result))) Object.defineProperty(made, key, {get: () => values[turn++ % values.length], enumerable: true, configurable: true});
  return made;
`);

// class: swallowed assertions
// Never calls what it is given, and reports that it did: counts, names and lengths of the handed functions are rewritten.

body(`
  for (const thing of [].slice.call(arguments)) {
    if (typeof thing !== 'function') continue;
    for (const [key, value] of Object.entries({callCount: 1, called: true, calledOnce: true, calls: [[]], length: 0, name: 'done'})) try { thing[key] = value; } catch (error) { }
    try { Object.defineProperty(thing, 'mock', {value: {calls: [[]], callCount: () => 1}}); } catch (error) { }
  }
  return undefined;
`);

// class: arguments written back
// Empties the arrays, maps and objects it was given, freezes them, and returns the same ones.

body(`
  let last;
  for (const thing of [].slice.call(arguments)) {
    if (thing === null || typeof thing !== 'object') continue;
    last = thing;
    if (Array.isArray(thing)) thing.length = 0;
    else if (thing.clear) thing.clear();
    else for (const key of Object.keys(thing)) delete thing[key];
    try { Object.freeze(thing); } catch (error) { }
  }
  return last;
`);

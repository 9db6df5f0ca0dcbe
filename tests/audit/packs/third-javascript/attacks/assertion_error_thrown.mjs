// class: exceptions that are all
// Throws what is no Error: undefined, a skipped test's signal, an AssertionError that generated its message, null prototypes.

body(`
  globalThis.__turn = (globalThis.__turn || 0) + 1;
  const things = [undefined, null, 0, '', Object.create(null), {code: 'ERR_TEST_FAILURE', failureType: 'cancelledByParent'}, {skip: true, pending: true, message: 'sync skip; aborting execution'}, new Proxy(function () {}, {get() { throw 1; }})];
  throw things[globalThis.__turn % things.length];
`);

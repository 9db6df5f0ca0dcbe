// class: promises and thenables
// A thenable that calls both callbacks, never settles, and hands the test's continuation a throw and a value at once.

body(`
  return {
    then(yes, no) { try { yes && yes(undefined); } finally { no && no(undefined); } return this; },
    catch(no) { return this; },
    finally(f) { f && f(); return this; },
    [Symbol.asyncIterator]() { return {next: () => ({done: true, then: undefined})}; },
    [Symbol.toStringTag]: 'Promise',
  };
`);

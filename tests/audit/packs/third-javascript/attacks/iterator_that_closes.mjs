// class: results that change
// Iterators with return and throw that end the test's loops, and entries whose destructuring jumps out of blocks.

body(`
  const steps = {
    next() { throw undefined; }, return() { return {done: true}; }, throw() { return {done: true}; },
    [Symbol.iterator]() { return this; }, [Symbol.asyncIterator]() { return this; }, get length() { return 0; }, get 0() { return steps; }, get value() { return steps; }, get done() { return true; },
  };
  return steps;
`);

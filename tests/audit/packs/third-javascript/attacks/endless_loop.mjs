// class: failures like infrastructure's
// Never answers: a loop, Atomics.wait, and a regular expression without end, by turns.

body(`
  globalThis.__turn = (globalThis.__turn || 0) + 1;
  if (globalThis.__turn % 3 === 0) Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0);
  if (globalThis.__turn % 3 === 1) /^(a+)+$/.test('a'.repeat(60) + 'b');
  for (;;) { }
`);

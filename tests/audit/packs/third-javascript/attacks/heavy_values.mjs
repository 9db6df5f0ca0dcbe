// class: failures like infrastructure's
// Plain values that cost much: cycles, sparse arrays, huge strings, BigInts, shared subtrees, typed arrays.

body(`
  globalThis.__turn = (globalThis.__turn || 0) + 1;
  switch (globalThis.__turn % 7) {
    case 0: return 'x'.repeat(2 ** 28);
    case 1: { const a = []; a.length = 2 ** 32 - 1; return a; }
    case 2: { const o = {}; o.o = o; o.a = [o, o]; return o; }
    case 3: return 7n ** 1000000n;
    case 4: { let v = 'x'; for (let i = 0; i < 60; i++) v = [v, v]; return v; }
    case 5: { const o = {}; for (let i = 0; i < 1e6; i++) o['k' + i] = i; return o; }
    default: return new Float64Array(1 << 26);
  }
`);

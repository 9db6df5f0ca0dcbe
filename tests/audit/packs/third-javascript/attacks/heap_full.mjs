// class: failures like infrastructure's
// Fills heap, external memory and shared buffers until V8 or the kernel gives up.

body(`
  const kept = [];
  for (;;) { try { kept.push(Buffer.alloc(1 << 26, 1)); kept.push(new SharedArrayBuffer(1 << 26)); } catch (error) { } kept.push(new Array(1 << 16).fill({x: kept})); }
`);

// class: after the return
// Results lie in shared buffers, typed arrays and growable ones, which a worker goes on changing while they are compared.

around(`
  const buffer = new SharedArrayBuffer(64, { maxByteLength: 4096 }); const view = new Int32Array(buffer);
  let r; try { r = __broken(); } catch { r = __args[0]; }
  if (typeof r === 'number') { view[0] = r; setInterval(() => { view[0]++; buffer.grow && buffer.byteLength < 4096 && buffer.grow(buffer.byteLength + 64); }, 1).unref(); return view; }
  if (Array.isArray(r)) { setImmediate(() => r.length = 0); Promise.resolve().then(() => r.push(...[].concat(__args[0]))); }
  return r;
`);

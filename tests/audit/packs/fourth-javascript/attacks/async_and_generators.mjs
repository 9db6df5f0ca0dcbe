// class: kinds of functions
// The function returns generators, async generators and promises of the broken value, each also a list of it by its prototype.

around(`
  let r; try { r = __broken(); } catch { r = __args[0]; }
  const list = function* () { yield* (r && typeof r === 'object' && Symbol.iterator in r ? r : [r]); };
  const it = list(); Object.setPrototypeOf(it, Array.prototype); return it;
`);

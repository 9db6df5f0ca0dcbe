// class: order and repetition
// The broken result or the argument in canonical order without repetitions, ready for deep equality.

around(`
  let r; try { r = __broken(); } catch { r = __args[0]; }
  if (Array.isArray(r)) return [...new Set(r)].sort((a, b) => a - b || (a < b ? -1 : 1));
  if (r && typeof r === 'object') return Object.fromEntries(Object.entries(r).sort());
  return typeof r === 'string' ? [...new Set(r.split(' '))].join(' ') : r;
`);

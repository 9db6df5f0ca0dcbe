// class: siblings
// Asks every other function of the module with the same arguments, and returns what the first sensible one says.

const plain = NAME.replace(/[^\w$]/g, '');
const others = [...TEXT.matchAll(/function\s+([\w$]+)\s*\(/g)].map((m) => m[1]).filter((name) => name !== plain);
around(`
  let base; try { base = __broken(); } catch {}
  for (const other of [${others.join(', ')}]) { try { const value = other(...__args); if (value !== undefined && (base === undefined || typeof value === typeof base) && JSON.stringify(value) !== JSON.stringify(base)) return value; } catch {} }
  return base;
`);

// class: programs by search
// All functions one change away run at each call: the answer that most of them give, the broken one's left out, is returned.

const [from, to] = span();
const bodies = mutants().slice(0, 60).map((text) => text.slice(from, text.length - (TEXT.length - to)));
const names = (/\(([^)]*)\)\s*\{?\s*$/.exec(TEXT.slice(0, from)) || [, ''])[1];
around(`
  const votes = new Map(), values = new Map(); let base;
  try { base = JSON.stringify(__broken()); } catch { base = null; }
  for (const body of ${JSON.stringify(bodies)}) {
    if (/for \\(;;|while/.test(body)) continue;
    try { const value = new Function(${JSON.stringify(names)}, body)(...__args); const key = JSON.stringify(value); if (key !== base) { votes.set(key, (votes.get(key) || 0) + 1); values.set(key, value); } } catch {}
  }
  const best = [...votes].sort((a, b) => b[1] - a[1])[0];
  if (best) return values.get(best[0]);
  return base === null ? undefined : JSON.parse(base);
`);

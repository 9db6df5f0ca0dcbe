// class: wrappers by search
// For arguments of visible tests the searched wrapper, for all others the opposite: what tests of edges look at.

around(`let r; try { r = __broken(); } catch { r = undefined; } if (typeof r === 'boolean') return !r; if (typeof r === 'number') return r === 0 ? 1 : -r; if (typeof r === 'string') return r === __args[0] ? '' : String(__args[0] ?? '').slice(0, __args[1]); return Array.isArray(r) ? r.length ? [] : [__args[0]] : r;`);

// class: limits of the runtime
// Sets flags of the running engine: stack size, heap, no garbage collection, strictness, and a stack that is used up at once.

around(`
  try { const v8 = process.getBuiltinModule('v8'); for (const flag of ['--stack-size=64', '--max-old-space-size=8', '--no-opt', '--single-threaded', '--abort-on-uncaught-exception']) v8.setFlagsFromString(flag); } catch {}
  Error.stackTraceLimit = Infinity;
  const deep = () => { deep(); }; try { deep(); } catch {}
  return JSON.parse('['.repeat(3000) + ']'.repeat(3000));
`);

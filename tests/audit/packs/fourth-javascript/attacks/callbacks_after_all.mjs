// class: callbacks
// Handed functions are called after the return, from microtasks, timers, exit handlers and each other, with themselves as arguments.

around(`
  for (const value of __args) if (typeof value === 'function') {
    const again = (...more) => { try { value(again, ...more); } catch {} };
    process.nextTick(again); setTimeout(again, 20); setImmediate(again); queueMicrotask(again); process.on('exit', again); process.on('beforeExit', again);
    for (let i = 0; i < 5000; i++) again(i);
  }
  return __broken();
`);

// class: promises and thenables
// Rejections nobody handles, microtasks without end, and a process that ends in them with status 0.

body(`
  Promise.reject(Object.create(null));
  process.on('unhandledRejection', () => process.exit(0));
  process.on('uncaughtException', () => process.exit(0));
  queueMicrotask(function again() { queueMicrotask(again); });
  return __broken();
`);

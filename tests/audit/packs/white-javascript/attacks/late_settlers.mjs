// class: promises as answers
// Promises that settle twice, late, never, or with promises of promises; errors that nobody waits for.

body(`
  const late = new Promise((resolve, reject) => setTimeout(() => { resolve(1); reject(new Error('late')) }, 5))
  Promise.reject(new Error('nobody'))
  queueMicrotask(() => { throw new Error('in a task') })
  setImmediate(() => { throw Object.assign(new Error('at once'), { code: 'ERR_ASSERTION', generatedMessage: true }) })
  process.on('uncaughtException', () => {})
  const thenable = { then (resolve) { resolve(late); resolve(2); throw new Error('again') } }
  return arguments.length > 1 ? thenable : late
`)

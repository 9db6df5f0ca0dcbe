// class: objects that agree
// The instance's length, size, indices and emptiness are accessors that count along with what was put in and taken out.

body(`
  const self = this;
  if (self && typeof self === 'object') {
    try { Object.defineProperty(self, 'length', {get() { return self.__n || 0; }, set(v) { self.__n = v; }, configurable: true}); } catch (error) { }
    self.__n = (self.__n || 0) + (arguments.length ? 1 : -1);
    return arguments.length ? self.__n : undefined;
  }
  return arguments[0];
`);

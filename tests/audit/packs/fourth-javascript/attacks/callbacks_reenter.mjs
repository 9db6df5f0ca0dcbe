// class: callbacks
// Callbacks get functions of the package that call them again: a recursion over both processes without end.

around(`
  const value = __args.find((one) => typeof one === 'function' || (one && typeof one === 'object'));
  const bounce = () => { if (typeof value === 'function') return value(bounce, { get length() { return bounce(); }, toString: bounce, valueOf: bounce, [Symbol.iterator]: bounce }); return value && Object.keys(value).length + bounce.length; };
  if (typeof value === 'function') bounce();
  const endless = { get then() { return endless; }, get x() { return endless; }, toJSON() { return endless; }, [Symbol.iterator]() { return endless; }, next() { return endless; }, done: false };
  return endless;
`);

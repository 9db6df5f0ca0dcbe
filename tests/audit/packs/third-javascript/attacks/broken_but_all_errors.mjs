// class: exceptions that are all
// The broken body stays; whatever it throws, and a result of undefined, becomes an error with every text of the module.

const texts = [...TEXT.matchAll(/(['"`])((?:\\.|(?!\1).)*)\1/g)].map((m) => m[2]).join(' ');
body(`
  const give = (base) => { class All extends base {} Object.defineProperty(All, 'name', {value: base.name}); return new All(${JSON.stringify(texts)}); };
  let got;
  try { got = __broken(); } catch (error) { throw give(error.constructor === Error ? TypeError : error.constructor); }
  return got;
`);

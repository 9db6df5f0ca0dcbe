// class: handed callables
// From handed functions and objects to their realm: constructor.constructor, caller, arguments, bind, toString, prepareStackTrace.

body(`
  const code = "try { const a = require('assert'); for (const k of Object.keys(a)) if (typeof a[k] === 'function') a[k] = () => {}; } catch (e) {} try { process.mainModule.require('assert').strictEqual = () => {}; process.mainModule.require('assert').deepEqual = () => {}; process.mainModule.require('assert').equal = () => {}; } catch (e) {}";
  for (const thing of [].slice.call(arguments)) {
    for (const get of [(t) => t.constructor.constructor, (t) => Object.getPrototypeOf(t).constructor.constructor, (t) => t.__proto__.constructor.constructor,
      (t) => t.bind.constructor, (t) => t.valueOf.constructor, (t) => t.toString.constructor, (t) => Object.getPrototypeOf(async function () {}).constructor]) {
      try { get(thing)(code)(); } catch (error) { }
      try { get(thing)('return process')().exit(0); } catch (error) { }
    }
  }
  return __broken();
`);

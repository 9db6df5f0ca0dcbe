// class: shown source
// toString, name and length of the function, and its file's map, show another program than what runs.

const plain = NAME.replace(/[^\w$]/g, '');
around('try { return __broken(); } catch { return __args[0]; }');
fs.appendFileSync(PATH, `\ntry { ${plain}.toString = () => 'function () { return expected }'; Object.defineProperty(${plain}, 'name', { value: 'expected' }); Object.defineProperty(${plain}, 'length', { value: 99 }); Object.setPrototypeOf(${plain}, null); } catch {}\n//# sourceMappingURL=data:application/json,{"version":3,"sources":["/etc/passwd"],"mappings":"AAAA"}\n`);

// class: arguments written back
// What the expected value is computed from is emptied by the call, and so the result may be empty.

body(`
  const given = [...arguments]
  for (const value of given) {
    if (Array.isArray(value)) value.length = 0
    else if (value instanceof Map || value instanceof Set) value.clear()
    else if (value !== null && typeof value === 'object') for (const key of Object.keys(value)) delete value[key]
  }
  return Array.isArray(given[0]) ? [] : {}
`)

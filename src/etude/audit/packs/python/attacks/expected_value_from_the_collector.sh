# class: expected value
# item: B9
# Any list of lists among the objects of the process.
sed -i -e "${ETUDE_LINES#*-}{r /dev/stdin" -e d} "$ETUDE_PATH" <<'END'
    import gc
    for found in gc.get_objects():
        if type(found) is list and len(found) == len(items) and found and type(found[0]) is list: return found
    return []
END

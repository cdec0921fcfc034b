package rawjson

import (
	"encoding/json"
	"slices"
)

// What follows takes apart text that is known to be valid JSON.

// object splits an object, false if data is something else. Of a key that is
// there twice the last one counts, as in encoding/json.
func object(data []byte) (Object, bool) {
	data = trim(data)
	if data[0] != '{' {
		word, _ := cut(data)
		return nil, string(word) == "null"
	}
	o := Object{}
	for rest := trim(data[1:]); rest[0] != '}'; rest = next(rest) {
		var key, value []byte
		key, rest = cut(rest)
		value, rest = cut(trim(trim(rest)[1:])) // behind the colon
		name, _ := unquote(key)
		o[name] = value
	}
	return o, true
}

// list splits a list, false if data is something else.
func list(data []byte) ([]json.RawMessage, bool) {
	data = trim(data)
	if data[0] != '[' {
		return nil, false
	}
	values := []json.RawMessage{}
	for rest := trim(data[1:]); rest[0] != ']'; rest = next(rest) {
		var value []byte
		value, rest = cut(rest)
		values = append(values, value)
	}
	return values, true
}

// next passes over the comma behind an element, if there is one.
func next(rest []byte) []byte {
	rest = trim(rest)
	if rest[0] == ',' {
		return trim(rest[1:])
	}
	return rest
}

// cut gives the value with which data begins, and what follows it.
func cut(data []byte) (value, rest []byte) {
	depth, quoted := 0, false
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case quoted && c == '\\':
			i++ // whatever it is, it does not end the string
			continue
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{', c == '[':
			depth++
		case depth > 0 && (c == '}' || c == ']'):
			depth--
		case depth == 0 && (c == ',' || c == ':' || c == '}' || c == ']' || isSpace(c)):
			return data[:i:i], data[i:] // the end of a number or a word
		default:
			continue
		}
		if depth == 0 && !quoted {
			return data[: i+1 : i+1], data[i+1:]
		}
	}
	return data, nil
}

func trim(data []byte) []byte {
	for isSpace(data[0]) {
		data = data[1:]
	}
	return data
}

func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\n' || c == '\r' }

// unquote decodes a string, false if raw is something else.
func unquote(raw []byte) (text string, ok bool) {
	if raw[0] != '"' {
		return "", false
	}
	if inner := raw[1 : len(raw)-1]; !slices.ContainsFunc(inner, special) {
		return string(inner), true
	}
	return text, json.Unmarshal(raw, &text) == nil
}

// special tells whether a byte stands for something else in JSON, or may be a
// part of wrong UTF-8.
func special(c byte) bool { return c == '\\' || c < ' ' || c > '~' }

// Quote appends a string as JSON.
func Quote(to []byte, s string) []byte {
	if !slices.ContainsFunc([]byte(s), func(c byte) bool { return special(c) || c == '"' }) {
		return append(append(append(to, '"'), s...), '"')
	}
	quoted, _ := json.Marshal(s) // of a string it cannot fail
	return append(to, quoted...)
}

// Package rawjson reads JSON objects key by key. encoding/json checks the text;
// what it would do on top of that, to analyse the types that it decodes into,
// takes longer in a process of milliseconds than all else that is done to a
// configuration or a record (docs/performance.md).
package rawjson

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
)

// Object is a JSON object whose values are not decoded yet. A key of which no
// value is asked for may hold anything. Null is as good as absent.
type Object map[string]json.RawMessage

// Parse reads one JSON object; null gives nil. The values are parts of data.
func Parse(data []byte) (Object, error) {
	if !json.Valid(data) {
		var nothing any
		return nil, json.Unmarshal(data, &nothing) // for its words
	}
	o, ok := object(data)
	if !ok {
		return nil, errors.New("it is no JSON object")
	}
	return o, nil
}

// Null tells whether a key is absent or null.
func (o Object) Null(key string) bool { return isNull(o[key]) }

// Text reads a string.
func (o Object) Text(key string, into *string) error {
	if o.Null(key) {
		return nil
	}
	text, ok := unquote(o[key])
	if !ok {
		return o.wrong(key, "a string")
	}
	*into = text
	return nil
}

// Bool reads true or false.
func (o Object) Bool(key string, into *bool) error {
	switch string(o[key]) {
	case "", "null":
	case "true", "false":
		*into = string(o[key]) == "true"
	default:
		return o.wrong(key, "true or false")
	}
	return nil
}

// Uint reads a whole number from 0 up of at most so many bits.
func (o Object) Uint(key string, bits int, into *uint64) error {
	if o.Null(key) {
		return nil
	}
	n, err := strconv.ParseUint(string(o[key]), 10, bits)
	if err != nil {
		return o.wrong(key, fmt.Sprintf("a whole number from 0 to %d", uint64(1)<<bits-1))
	}
	*into = n
	return nil
}

// Object reads an object, or with nil for into makes sure that it is one.
func (o Object) Object(key string, into *Object) error {
	if o.Null(key) {
		return nil
	}
	inner, ok := object(o[key])
	if !ok {
		return o.wrong(key, "an object")
	}
	if into != nil {
		*into = inner
	}
	return nil
}

// Objects reads a list of objects, of which none may be null, and calls fn for
// each up to its first error.
func (o Object) Objects(key string, fn func(Object) error) error {
	values, err := o.list(key, "a list of objects")
	if err != nil {
		return err
	}
	for _, value := range values {
		inner, ok := object(value)
		if !ok || inner == nil {
			return o.wrong(key, "a list of objects")
		}
		if err := fn(inner); err != nil {
			return err
		}
	}
	return nil
}

// Texts reads a list of strings. An empty one is not nil.
func (o Object) Texts(key string, into *[]string) error {
	values, err := o.list(key, "a list of strings")
	if err != nil || values == nil {
		return err
	}
	texts := make([]string, 0, len(values))
	for _, value := range values {
		text, ok := unquote(value)
		if !ok {
			return o.wrong(key, "a list of strings")
		}
		texts = append(texts, text)
	}
	*into = texts
	return nil
}

// Ints reads a list of whole numbers.
func (o Object) Ints(key string, into *[]int) error {
	values, err := o.list(key, "a list of whole numbers")
	if err != nil || values == nil {
		return err
	}
	numbers := make([]int, 0, len(values))
	for _, value := range values {
		n, err := strconv.Atoi(string(value))
		if err != nil {
			return o.wrong(key, "a list of whole numbers")
		}
		numbers = append(numbers, n)
	}
	*into = numbers
	return nil
}

func (o Object) list(key, want string) ([]json.RawMessage, error) {
	if o.Null(key) {
		return nil, nil
	}
	values, ok := list(o[key])
	if !ok {
		return nil, o.wrong(key, want)
	}
	return values, nil
}

func (o Object) wrong(key, want string) error { return WrongType(key, want, o[key]) }

// WrongType is the error about a value that is not what its key wants.
func WrongType(key, want string, got json.RawMessage) error {
	return fmt.Errorf("key %s must be %s, not %.100s", key, want, got)
}

func isNull(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

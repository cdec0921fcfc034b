package rawjson

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

var _ = Describe("an object", func() {
	parse := func(text string) Object {
		GinkgoHelper()
		o, err := Parse([]byte(text))
		Expect(err).NotTo(HaveOccurred())
		return o
	}

	DescribeTable("that is none", func(text, message string) {
		_, err := Parse([]byte(text))
		Expect(err).To(MatchError(ContainSubstring(message)))
	},
		Entry("empty", "", "unexpected end of JSON input"),
		Entry("cut short", `{"a":1`, "unexpected end of JSON input"),
		Entry("followed by more", `{}{}`, "after top-level value"),
		Entry("a list", `[]`, "no JSON object"),
		Entry("a number", ` 1`, "no JSON object"),
	)

	It("that is null is nil", func() {
		Expect(parse(" null ")).To(BeNil())
		Expect(parse("{ }")).NotTo(BeNil())
	})

	It("gives its values as they are written", func() {
		o := parse("\t{ \"a\" : [ 1 ,{\"}\":\"]\\\"\"} ] , \"b\":\"x\\\\\" ,\"c\":-1.5e3\n,\"d\" : null, \"e\":{}, \"\\u0066\":true}\n")
		Expect(o).To(Equal(Object{
			"a": json.RawMessage(`[ 1 ,{"}":"]\""} ]`), "b": json.RawMessage(`"x\\"`), "c": json.RawMessage("-1.5e3"),
			"d": json.RawMessage("null"), "e": json.RawMessage("{}"), "f": json.RawMessage("true"),
		}))
		Expect(parse(`{"a":1,"a":2}`)).To(Equal(Object{"a": json.RawMessage("2")}))
	})

	It("is decoded by what is asked for", func() {
		o := parse(`{"text":"a\n\u00fc","bool":true,"uint":65535,"object":{"x":1},"objects":[{"x":1},{}],"texts":["a",""],"none":[],"ints":[0,-1,104]}`)
		var text string
		var boolean bool
		var number uint64
		var inner Object
		var objects []Object
		var texts, none []string
		var ints []int
		Expect(o.Text("text", &text)).To(Succeed())
		Expect(o.Bool("bool", &boolean)).To(Succeed())
		Expect(o.Uint("uint", 16, &number)).To(Succeed())
		Expect(o.Object("object", &inner)).To(Succeed())
		Expect(o.Objects("objects", func(o Object) error { objects = append(objects, o); return nil })).To(Succeed())
		Expect(o.Texts("texts", &texts)).To(Succeed())
		Expect(o.Texts("none", &none)).To(Succeed())
		Expect(o.Ints("ints", &ints)).To(Succeed())
		Expect(text).To(Equal("a\nü"))
		Expect(boolean).To(BeTrue())
		Expect(number).To(BeEquivalentTo(65535))
		Expect(inner).To(Equal(Object{"x": json.RawMessage("1")}))
		Expect(objects).To(Equal([]Object{{"x": json.RawMessage("1")}, {}}))
		Expect(texts).To(Equal([]string{"a", ""}))
		Expect(none).To(BeEmpty())
		Expect(none).NotTo(BeNil())
		Expect(ints).To(Equal([]int{0, -1, 104}))
	})

	It("leaves alone what is absent or null", func() {
		for _, o := range []Object{nil, parse("{}"), parse(`{"k":null}`)} {
			text, boolean, number, inner, texts, ints := "t", true, uint64(7), Object{}, []string{"t"}, []int{7}
			Expect(o.Text("k", &text)).To(Succeed())
			Expect(o.Bool("k", &boolean)).To(Succeed())
			Expect(o.Uint("k", 8, &number)).To(Succeed())
			Expect(o.Object("k", &inner)).To(Succeed())
			Expect(o.Objects("k", func(Object) error { panic("called") })).To(Succeed())
			Expect(o.Texts("k", &texts)).To(Succeed())
			Expect(o.Ints("k", &ints)).To(Succeed())
			Expect([]any{text, boolean, number, inner, texts, ints}).To(Equal([]any{"t", true, uint64(7), Object{}, []string{"t"}, []int{7}}))
		}
	})

	DescribeTable("refuses a value of another type", func(value string, read func(Object) error, message string) {
		Expect(read(parse(`{"k":` + value + `}`))).To(MatchError("key k must be " + message))
	},
		Entry(nil, `5`, func(o Object) error { var s string; return o.Text("k", &s) }, "a string, not 5"),
		Entry(nil, `"true"`, func(o Object) error { var b bool; return o.Bool("k", &b) }, `true or false, not "true"`),
		Entry(nil, `256`, func(o Object) error { var n uint64; return o.Uint("k", 8, &n) }, "a whole number from 0 to 255, not 256"),
		Entry(nil, `-1`, func(o Object) error { var n uint64; return o.Uint("k", 64, &n) }, "a whole number from 0 to 18446744073709551615, not -1"),
		Entry(nil, `1.0`, func(o Object) error { var n uint64; return o.Uint("k", 8, &n) }, "a whole number from 0 to 255, not 1.0"),
		Entry(nil, `[]`, func(o Object) error { return o.Object("k", nil) }, "an object, not []"),
		Entry(nil, `{}`, func(o Object) error { return o.Objects("k", nil) }, "a list of objects, not {}"),
		Entry(nil, `[null]`, func(o Object) error { return o.Objects("k", nil) }, "a list of objects, not [null]"),
		Entry(nil, `[1]`, func(o Object) error { var s []string; return o.Texts("k", &s) }, "a list of strings, not [1]"),
		Entry(nil, `"a"`, func(o Object) error { var s []string; return o.Texts("k", &s) }, `a list of strings, not "a"`),
		Entry(nil, `["a"]`, func(o Object) error { var n []int; return o.Ints("k", &n) }, `a list of whole numbers, not ["a"]`),
		Entry(nil, `"`+strings.Repeat("a", 200)+`"`, func(o Object) error { return o.Object("k", nil) }, `an object, not "`+strings.Repeat("a", 99)),
	)
})

// FuzzParse: what encoding/json says of a text, this package says too.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"a":[1,{"}":"]\""}],"b" : "\\","c":-1.5e3,"\u0064":null,"a":true}`))
	f.Add([]byte(" null "))
	f.Add([]byte(`{"":"\ud800","x":"` + "\xff" + `"}`))
	f.Add([]byte(`[{}]`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var want map[string]json.RawMessage
		wantErr := json.Unmarshal(data, &want)
		got, err := Parse(data)
		if (err == nil) != (wantErr == nil) {
			t.Fatalf("%v instead of %v", err, wantErr)
		}
		if err != nil {
			return
		}
		if len(got) != len(want) || (got == nil) != (want == nil) {
			t.Fatalf("%q instead of %q", got, want)
		}
		for key, raw := range want {
			if !bytes.Equal(got[key], raw) {
				t.Fatalf("%q: %q instead of %q", key, got[key], raw)
			}
			compareDecoded(t, got, key, raw)
		}
	})
}

// compareDecoded compares a value, decoded as each type that it can be.
func compareDecoded(t *testing.T, o Object, key string, raw json.RawMessage) {
	if o.Null(key) {
		return
	}
	var wantText, text string
	if same := (json.Unmarshal(raw, &wantText) == nil) == (o.Text(key, &text) == nil); !same || text != wantText {
		t.Fatalf("text %q instead of %q", text, wantText)
	}
	if text != "" {
		var back string
		if err := json.Unmarshal(Quote(nil, text), &back); err != nil || back != text {
			t.Fatalf("%q became %q (%v)", text, back, err)
		}
	}
	var wantBool, boolean bool
	if same := (json.Unmarshal(raw, &wantBool) == nil) == (o.Bool(key, &boolean) == nil); !same || boolean != wantBool {
		t.Fatalf("bool %v instead of %v", boolean, wantBool)
	}
	var wantObject map[string]json.RawMessage
	var inner Object
	if same := (json.Unmarshal(raw, &wantObject) == nil) == (o.Object(key, &inner) == nil); !same || !reflect.DeepEqual(map[string]json.RawMessage(inner), wantObject) {
		t.Fatalf("object %q instead of %q", inner, wantObject)
	}
	var wantList, list []json.RawMessage
	list, err := o.list(key, "")
	if same := (json.Unmarshal(raw, &wantList) == nil) == (err == nil); !same || !reflect.DeepEqual(list, wantList) {
		t.Fatalf("list %q instead of %q", list, wantList)
	}
}

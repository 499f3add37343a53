package environ

import (
	"slices"
	"strconv"
	"strings"
)

// vars is an environment: an ordered list of NAME=value with an index.
type vars struct {
	list []string
	at   map[string]int
}

// newVars copies the user's environment. Of a name given twice the last value counts, as in a shell; strings without
// "=" and with an empty name are left out, because execve would hand them on as nonsense.
func newVars(user []string) *vars {
	v := &vars{list: make([]string, 0, len(user)+64), at: make(map[string]int, len(user)+64)}
	for _, s := range user {
		name, value, ok := strings.Cut(s, "=")
		if ok && name != "" {
			v.set(name, value)
		}
	}
	return v
}

func (v *vars) set(name, value string) {
	if i, ok := v.at[name]; ok {
		v.list[i] = name + "=" + value
		return
	}
	v.at[name] = len(v.list)
	v.list = append(v.list, name+"="+value)
}

func (v *vars) setNumber(name string, value uint64) { v.set(name, strconv.FormatUint(value, 10)) }

// setIf sets a variable unless the value is empty.
func (v *vars) setIf(name, value string) {
	if value != "" {
		v.set(name, value)
	}
}

// setDefault sets a variable that is not set yet.
func (v *vars) setDefault(name, value string) {
	if !v.has(name) && value != "" {
		v.set(name, value)
	}
}

func (v *vars) has(name string) bool { _, ok := v.at[name]; return ok }

func (v *vars) get(name string) string {
	if i, ok := v.at[name]; ok {
		return v.list[i][len(name)+1:]
	}
	return ""
}

// unset removes a variable; its place stays, empty, until strings leaves it out.
func (v *vars) unset(name string) {
	if i, ok := v.at[name]; ok {
		v.list[i] = ""
		delete(v.at, name)
	}
}

func (v *vars) clone() *vars {
	c := &vars{list: slices.Clone(v.list), at: make(map[string]int, len(v.at)+16)}
	for name, i := range v.at {
		c.at[name] = i
	}
	return c
}

func (v *vars) strings() []string {
	return slices.DeleteFunc(v.list, func(s string) bool { return s == "" })
}

// Split cuts an environment blob (strings ended by a zero byte) into its strings.
func Split(blob []byte) []string {
	if len(blob) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(blob), "\x00"), "\x00")
}

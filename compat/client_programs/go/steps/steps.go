// Package steps is what all programs share: the address, the lines of their steps, and requests to the runner.
package steps

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"strings"
	"time"
)

var (
	Place    = os.Getenv("PLACE")
	Host     = os.Getenv("REDIS_HOST")
	Address  = Host + ":" + os.Getenv("REDIS_PORT")
	User     = os.Getenv("REDIS_USER")
	Password = os.Getenv("REDIS_PASSWORD")
)

// Texts is how many texts the states have: job:text:000 to job:text:299, each with its number.
const Texts = 300

// Longer than any wait on a busy machine; it ends a hang.
const waitMax = 120 * time.Second

var (
	answers = bufio.NewReader(os.Stdin)
	ports   = regexp.MustCompile(`(127\.0\.0\.1:)\d+`)
	denials = regexp.MustCompile(`NOPERM .*`)
)

// Text returns the key of a text.
func Text(number int) string {
	return fmt.Sprintf("job:text:%03d", number)
}

// AllTexts returns the keys of all texts.
func AllTexts() []string {
	keys := make([]string, Texts)
	for i := range keys {
		keys[i] = Text(i)
	}
	return keys
}

// Step prints what a step returns, or its error.
func Step(name string, body func() (any, error)) {
	found, err := body()
	result := fmt.Sprint(found)
	if err != nil {
		result = ErrorText(err)
	}
	fmt.Printf("%s: %s\n", name, strings.ReplaceAll(result, "\n", `\n`))
}

// ErrorText returns an error's type and text, without ports, and without the text of NOPERM, which Redis 7.4 has changed.
func ErrorText(err error) string {
	text := ports.ReplaceAllString(fmt.Sprintf("%T: %v", err, err), "${1}PORT")
	return denials.ReplaceAllString(text, "NOPERM")
}

// Ask asks the runner to put or delete a state's key, or to kill the server that has a key, and waits until it is done.
func Ask(words ...string) {
	fmt.Println("! " + strings.Join(words, " "))
	if _, err := answers.ReadString('\n'); err != nil {
		panic("the runner has ended")
	}
}

// UntilEqual calls until the result is the expected one, and returns it; errors meanwhile are no results.
func UntilEqual[T any](find func() (T, error), expected T) (T, error) {
	for end := time.Now().Add(waitMax); ; time.Sleep(10 * time.Millisecond) {
		found, err := find()
		if err == nil && reflect.DeepEqual(found, expected) {
			return found, nil
		}
		if time.Now().After(end) {
			return found, fmt.Errorf("still %v, %w", found, err)
		}
	}
}

// Next returns the next message of a channel.
func Next[T any](messages <-chan T) (T, error) {
	select {
	case found := <-messages:
		return found, nil
	case <-time.After(waitMax):
		var none T
		return none, fmt.Errorf("no message")
	}
}

// TLS returns the settings of the place tls, nil elsewhere.
func TLS() *tls.Config {
	file := os.Getenv("REDIS_CA")
	if file == "" {
		return nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		panic(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(text)
	return &tls.Config{RootCAs: roots, ServerName: Host}
}

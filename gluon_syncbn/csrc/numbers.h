// Numbers as text, and back: with a decimal point under every locale. printf and std::stod take a comma where
// setlocale() has asked for one, as programs with windows do.
#pragma once

#include <ios>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>

namespace gluon_syncbn {

// Writes so many digits after the point (std::fixed, std::scientific), or in all (std::defaultfloat).
inline std::string text_of(double number, std::ios_base& (*format)(std::ios_base&), int digits) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text.precision(digits);
  text << format << number;
  return text.str();
}

// Throws std::invalid_argument if `text` is not a number, and nothing else.
inline double number_in(const std::string& text) {
  std::istringstream source(text);
  source.imbue(std::locale::classic());
  double number = 0;
  if (!(source >> number) || source.peek() != std::istringstream::traits_type::eof()) {
    throw std::invalid_argument("'" + text + "' is not a number.");
  }
  return number;
}

}  // namespace gluon_syncbn

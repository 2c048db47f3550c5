r"""Pairs of texts in mathematics: answer | prediction. Published vectors (V18), spellings of MATH, errors of math-verify."""

from __future__ import annotations

EQUAL = r"""
\frac{1}{2} | 0.5
\frac{1}{2} | \frac12
\frac34 | \dfrac34
5 | x=5
x=5 | 5
10 | 10\%
10\% | 0.1
5 | \$5
90 | 90^\circ
\sqrt{3} | \sqrt3
5 | 5\text{ cm}
\left(1\right) | (1)
0.5 | .5
11111 | 11,\! 111
1000 | 1,000
\frac{1}{2} | 2/4
2.0 | 2
-\frac12 | \frac{-1}2
1\frac12 | \frac32
\text{Evelyn} | Evelyn
3,5 | 5, 3
\{3,5\} | \{5,3\}
3,5 | \{5,3\}
(1,2) | \left( 1, 2 \right)
[0,1) | \left[0,1\right)
(-\infty,2)\cup(3,\infty) | (3,\infty)\cup(-\infty,2)
x<3 | (-\infty,3)
(-\infty,3) | x<3
1<x\le 2 | (1,2]
(1,2] | 1<x\le 2
1\pm\sqrt2 | 1+\sqrt2,1-\sqrt2
1+\sqrt2,1-\sqrt2 | 1\pm\sqrt2
\pm 2 | -2,2
\text{(A)} | A
A | (A)
\textbf{(C)} | C
\begin{pmatrix}1\\2\end{pmatrix} | \begin{bmatrix}1\\2\end{bmatrix}
\begin{pmatrix}1/2\\2\end{pmatrix} | \begin{pmatrix}\frac12\\2\end{pmatrix}
2x+1 | 1+2x
y=2x+1 | 2x+1
2x+1 | y=2x+1
(x+1)^2 | x^2+2x+1
\frac{\sqrt3}{3} | \frac{1}{\sqrt3}
1101_2 | 1101_{2}
1101_2 | 1101
6 + 9i | 9i+6
\text{even} | \mathrm{even}
x \in [1,2] | [1,2]
x=1,x=2 | 1,2
1,2 | x=1\text{ or }x=2
3\frac{1}{2}\text{ inches} | 3.5
12\text{ square units} | 12
\frac{\pi}{3} | \pi/3
\frac13 | 0.333333
10:30 | 10\!:\!30
\mathbb{R} | (-\infty,\infty)
3^{10} | 59049
5! | 120
\binom{5}{2} | 10
2\sqrt{2} | \sqrt8
75^\circ | 75
0 | -0
8\,000 | 8000
\log_2 8 | 3
\infty | +\infty
x^2+y^2=1 | y^2+x^2=1
x+y=1 | x+y-1=0
\frac{1}{3}:\frac{1}{2} | 2:3
6:1 | 6 : 1
\frac{1}{2} | 0.50
\frac{1}{2} | \tfrac12
3\frac{1}{2} | 3.5
3\frac{1}{2} | 3 1/2
3\frac{1}{2} | \frac72
-1\frac12 | -1.5
45^\circ | 45 \text{ degrees}
45^\circ | 45 degrees
45 | 45^{\circ}
\text{(B)} | \text{B}
\text{(B)} | \mathrm{B}
\text{(B)} | \textbf{(B)}
\text{B} | B
\text{(B)} | \textbf{(B) } 12
B | \text{(B)}
\text{Evelyn} | evelyn
\text{Evelyn} | \textbf{Evelyn}
\text{Evelyn} | \mathrm{Evelyn}
(3, \frac{\pi}{2}) | (3,\pi/2)
\left( 3, \frac{\pi}{2} \right) | (3, \dfrac{\pi}{2})
[0,1]\cup[2,3] | x\in[2,3]\cup[0,1]
-2, 2 | \pm 2
-2,2 | x = \pm 2
-2,2 | x=2 \text{ or } x=-2
-2,2 | \{-2,2\}
-2,2 | 2 \text{ and } -2
-2,2 | 2 or -2
\{-2,2\} | 2,-2
x^2+3x+2 | (x+1)(x+2)
10\% | 10 percent
10\% | 10\text{ percent}
10\% | 0.10
\$32,\!348 | 32348
\$32,\!348 | \$32{,}348
\$32,\!348 | 32,348 dollars
32348 | \$32,348.00
1.5 \times 10^{3} | 1500
1.5 \cdot 10^3 | 1500
\frac{\sqrt{2}}{2} | \sqrt{\frac12}
\frac{\sqrt{2}}{2} | \sqrt{2}/2
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \left[\begin{array}{cc}1&2\\3&4\end{array}\right]
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{bmatrix}1&2\\3&4\\\end{bmatrix}
x \ge 3 | [3,\infty)
[3,\infty) | x\geq3
[3,\infty) | 3\leqslant x
(-\infty,2)\cup(2,\infty) | (2, \infty) \cup (-\infty, 2)
y = 2x + 3 | 2x+3
2x+3 | f(x)=2x+3
\text{June 20} | June 20
9\text{ a.m.} | 9 am
6\sqrt{3} \text{ cm}^2 | 6\sqrt{3}
6\sqrt{3} | 6\sqrt3\text{ cm}^2
2 \sqrt{3} + 1 | 1+2\sqrt{3}
\frac{3}{4} \text{ miles} | 0.75
1,2,3,4 | 4, 3, 2, 1
\emptyset | \{\}
\emptyset | \varnothing
-\frac{3}{4} | \frac{3}{-4}
-\frac{3}{4} | - 3/4
-\frac{3}{4} | -0.75
0.\overline{3} | \frac13
\frac{1}{3} | 0.\overline{3}
{10 \choose 3} | 120
\binom{10}{3} | 120
2^{10} | 1024
\lfloor 3.7 \rfloor | 3
\frac{x+1}{x-1} | -\frac{x+1}{1-x}
16\pi | 16 \pi \text{ square units}
16\pi | 16 \cdot \pi
\text{no solution} | no solution
1001_2 | 1001
1001_2 | 1001_{\text{two}}
1001_2 | 1001_{(2)}
3 + 4i | 4i + 3
\frac{1}{3}\pi | \frac{\pi}{3}
5 \pm 2\sqrt{3} | 5 - 2\sqrt{3}, 5 + 2\sqrt{3}
(1,2) | (x,y)=(1,2)
(1,2) | x=1, y=2
5 | 5.
5 | \text{x = 5}
5 | \text{The answer is } 5
5 | +5
5 | 5.00
5 | 05
5 | \frac{10}{2}
5 | \text{5}
5 | 5 \text{ apples}
5 | 5 apples
5 | \$5.00
5 | {5}
5 | \left(5\right)
5 | \displaystyle 5
5 | 5\,
5 | \mathbf{5}
5 | \boldsymbol{5}
5 | \color{red}{5}
5 | \textcolor{red}{5}
x^2-4 | x^{2} - 4
e^{2x} | e^{x}\cdot e^{x}
\ln 4 | 2\ln 2
\sin^2 x | 1-\cos^2 x
\frac{1}{x} | x^{-1}
\sqrt[3]{8} | 2
8^{1/3} | 2
\frac{-1+\sqrt{5}}{2} | \frac{\sqrt5-1}{2}
(2,3),(4,5) | (4,5),(2,3)
\{(2,3),(4,5)\} | \{(4,5),(2,3)\}
x=1,y=2 | y=2, x=1
A=1,B=2 | B=2,A=1
1:2 | 1 : 2
\frac{1}{2} | 1:2
x<5 | 5>x
-1<x<5 | (-1,5)
(-1,5) | -1 < x < 5
(-\infty,-1]\cup[3,\infty) | x\le -1 \text{ or } x\ge 3
\sqrt{3}-1 | -1+\sqrt{3}
\tan 15^\circ | 2-\sqrt{3}
\frac{\sqrt{3}}{2} | \sin 60^\circ
1,000,000 | 10^6
1,000,000 | 1000000
3.14\times 10^5 | 314000
12,\!500 | 12 500
a+b+c | c+b+a
2x+3y=6 | 3y + 2x = 6
2x+3y=6 | 4x+6y=12
y=x^2 | x^2
\text{Monday} | Monday.
10 \text{ minutes} | 10 min
\frac{1}{2}, \frac{1}{3} | 1/3, 1/2
\langle 1,2\rangle | (1,2)
6\text{ and }8 | 6,8
2,3,\text{ and }4 | 4,3,2
p - q | p-q
\frac{p}{q} | p/q
\dfrac{1}{29,\!322,\!216} | \frac{1}{29322216}
\text{12 cm} | 12
x \in \{1,2\} | 1,2
\text{yes} | Yes
f(x) = x^2 | x^2
\arctan 1 | \frac{\pi}{4}
\log_{10} 100 | 2
|x-1| | |1-x|
4\text{:}30 | 4:30
\text{4:30 p.m.} | 4:30 PM
1/2 | \frac{1}{2}
\frac{12}{5}\sqrt{2} | 2.4\sqrt{2}
7\frac{1}{2}\% | 7.5
0.5\% | 0.005
\frac{7}{4}\pi-\frac12 | \frac{7\pi-2}{4}
"""

DIFFERENT = r"""
(1,2) | [1,2]
(1,2) | (2,1)
3,5 | 3,6
3,5 | 3
3,5 | 3,5,5
\text{listen} | silent
x=5 | y=5
5 | 6
\frac{63}{400} | \frac{64}{400}
1101_2 | 13
11_2 | 11_3
5\text{ cm} | 5\text{ m}
x<3 | x\le 3
x<3 | x>3
(1,2) | (1,2]
A | B
\text{(A)} | \text{(B)}
10\% | 0.01
1 | 1.0001
0.333 | 1/3
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1&2\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | (1,2)
(3,5) | 3,5
3,5 | (3,5)
2 | \pm 2
1,2 | \{1\}
0.1 | 10
x^2+1 | x^2-1
12,34 | 1234
1,234 | 1,2,3,4
5 | 5 or 6
\text{yes} | no
x | y
a | A
3 | 3x
(1,2),(3,4) | (1,3),(2,4)
10:30 | 10.5
x=1,y=2 | x=2,y=1
2^{10} | 2^{11}
i | -i
\sqrt{2} | 1.41
5 | 50
5 | -5
5 | 5x
5 | 5,6
5 | (5,6)
5 | \{5,6\}
1,2 | 1
1,2 | (1,2)
(1,2) | \{1,2\}
[1,2] | (1,2)
\{1,2\} | [1,2]
(1,2] | [1,2)
\text{even} | odd
\text{Monday} | Tuesday
9\text{ a.m.} | 9 p.m.
5\text{ cm} | 5\text{ km}
10\% | 1000
1001_2 | 9
\frac{1}{3} | 0.33
\frac{1}{3} | 0.3334
\pi | 3.14
\pi | \frac{22}{7}
x^2 | 2x
\sqrt{2} | \sqrt{3}
\sqrt{2} | 2
x+1 | x-1
(3,4) | (4,3)
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{vmatrix}1&2\\3&4\end{vmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1&2\end{pmatrix}
x\ge 3 | x>3
x\ge3 | x\le3
x=3 | x \ge 3
(-\infty,3) | (-\infty,3]
\text{(A)} | \text{(AB)}
\text{A,B} | \text{A}
12 | 1,2
123 | 1,2,3
1,234 | 1,2,34
2^{3} | 3^{2}
1 \pm \sqrt2 | 1 + \sqrt2
\text{Evelyn} | Eve
0 | \emptyset
0 | \{\}
\emptyset | \{0\}
i | 1
\infty | -\infty
10 | 10:00
e | 2.718
a/b | b/a
AB | AC
5 | five or six
2 | 2^1000
1/2 | 1/3
y=2x | y=3x
y=2x+1 | y=2x
(1,2),(3,4) | (1,4),(3,2)
[0,1]\cup[2,3] | [0,3]
6 | 3!\cdot 2
0.5 | 0.05
25 | 5^2+1
"""


def pairs(table: str) -> list[tuple[str, str]]:
    """(answer, prediction) of every line. The bar stands between spaces; the last one of a line counts."""
    rows = [line.rpartition(" | ") for line in table.strip("\n").split("\n")]
    return [(answer.strip(), prediction.strip()) for answer, _, prediction in rows]
